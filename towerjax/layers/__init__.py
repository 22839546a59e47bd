"""Parts of models: batch norm over towers, tables with sparse gradients."""
