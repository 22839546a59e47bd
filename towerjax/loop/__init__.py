"""The loop: batches in, steps dispatched, metrics kept, evaluated now and then."""
