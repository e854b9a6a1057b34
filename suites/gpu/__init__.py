"""What only an accelerator can show, most of it CUDA alone; worlds on a CPU have none of these cases."""
