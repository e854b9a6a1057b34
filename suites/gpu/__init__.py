"""GPU: cases that need an accelerator, most of them CUDA; worlds on a CPU have none of them."""
