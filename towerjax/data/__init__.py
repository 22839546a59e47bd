"""Global batches: cut from data, split over towers, padded, and placed on devices."""
