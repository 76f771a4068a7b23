//! teeline-os
