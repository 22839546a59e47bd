"""Programs of others, as data, and one driver that asks towerjax about each of them."""
