"""GPUs: copies, streams, and the transports that stage through host memory or read windows on the device."""
