//! Intra-op threads and the random generator of the calling thread's libtorch.

/// Sets OpenMP's width for the calling thread: under OpenMP the setting is per thread.
pub fn set_intra_op(threads: usize) {
    tch::set_num_threads(threads as i32);
}
