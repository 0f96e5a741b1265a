//! resnet.
