"""What is measured of a run, and where it is logged; nothing here changes what is learned."""
