"""What crosses the network: attrs types and codecs. Pure; knows no Trio, no server and no model."""
