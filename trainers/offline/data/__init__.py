"""What offline stages learn from: public files and recorded episodes, as conversations."""
