"""What only a CUDA device can show; deselected in every other world."""
