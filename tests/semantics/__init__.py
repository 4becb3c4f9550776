"""What a program on the device means: the same as on eager CPU, however it is recorded, cut, compiled or read."""
