//! teeline-delivery
