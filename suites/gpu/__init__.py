"""GPU: cases that need an accelerator, most of them CUDA; none run in worlds on a CPU."""
