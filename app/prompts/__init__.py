"""What a caller may ask for, as plain values: the pieces that the backends' resolution is made of."""
