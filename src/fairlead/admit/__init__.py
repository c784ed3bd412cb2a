"""Flow control: who goes next. Requests wait here while no endpoint is open for them."""
