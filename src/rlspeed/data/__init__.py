"""Tables in and out, prompts, sorting and packing of files. No torch."""
