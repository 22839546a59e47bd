"""TensorFlow's verbs: what strategies do with all towers' values outside a step."""
