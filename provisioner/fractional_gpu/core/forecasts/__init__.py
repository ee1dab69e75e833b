"""What is learnt from swaps, cells and waits, its accuracy, and advice about shares."""
