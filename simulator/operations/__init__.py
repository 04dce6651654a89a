"""What is computed. Each file has one operation: its operands, its judge in float64, and its error bound."""
