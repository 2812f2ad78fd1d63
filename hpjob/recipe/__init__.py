"""What a person wants to train: model shape, data, batch, optimizer, parallel settings."""
