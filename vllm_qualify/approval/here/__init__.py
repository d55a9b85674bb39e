"""What is deployed, compared with what an approval says: a folder of weights, an image, or a server that answers."""
