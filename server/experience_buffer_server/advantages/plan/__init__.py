"""What is to be computed: parameters, their checks, and the order of the stages."""
