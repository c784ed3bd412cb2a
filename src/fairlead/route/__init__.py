"""Decision → what the gateway is told: header mutations, metadata, rejections."""
