//! operator.
