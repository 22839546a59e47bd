"""The methods of strategies: what they do with all towers' values outside a step."""
