"""llama.cpp's and TGI's own forms of a text completion."""
