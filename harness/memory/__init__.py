"""What happens to memory as it happens: operators, collectives and resizes, told to whoever watches a rank."""
