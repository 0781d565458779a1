"""A static model of GPU kernels: they are compiled ahead of time, disassembled, and simulated on streaming
multiprocessors that issue in order. No GPU is needed."""
