"""What other libraries need before they run here; a process asks for it by name."""
