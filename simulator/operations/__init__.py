"""What is computed, an operation a file: its operands, its judge in float64, how far a result may be from the truth."""
