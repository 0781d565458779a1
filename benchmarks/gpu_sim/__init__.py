"""A static model of GPU kernels that no GPU has run: what is compiled ahead of time is disassembled and played through
streaming multiprocessors that issue in order."""
