"""Tables of request fields: supported, ignored or refused; what all wires share."""
