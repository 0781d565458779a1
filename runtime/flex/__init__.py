"""PyTorch's flex_attention API on frisket; `import frisket.flex` has the public names."""
