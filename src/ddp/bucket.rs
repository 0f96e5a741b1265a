//! Which gradients travel together: the bucket plan. Pure.

use tch::{Device, Kind};

/// What the plan has to know about a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Item {
    /// Bytes of its elements.
    pub bytes: usize,
    /// Element type.
    pub kind: Kind,
    /// Where it lies.
    pub device: Device,
}

/// Puts tensors into buckets, in the order in which their gradients are expected.
///
/// `order` lists positions in `items`; `limits` are bytes. The rule is PyTorch's
/// `compute_bucket_assignment_by_size`: tensors of one element type and device share a bucket until it
/// has reached its limit (so a bucket may overshoot by its last tensor); the first bucket of a type has
/// the first limit, the next one the second, and all further ones the last. Buckets come back in the
/// order in which they filled up, those that never did at the end.
pub fn assign(items: &[Item], order: &[usize], limits: &[usize]) -> Vec<Vec<usize>> {
    struct Open {
        kind: Kind,
        device: Device,
        members: Vec<usize>,
        bytes: usize,
        limit: usize,
    }
    let mut full = Vec::new();
    // A list, not a map: ranks must agree on the order of what is left over.
    let mut open: Vec<Open> = Vec::new();
    for &index in order {
        let Item { bytes, kind, device } = items[index];
        let known = open.iter().position(|bucket| (bucket.kind, bucket.device) == (kind, device));
        let at = known.unwrap_or_else(|| {
            open.push(Open { kind, device, members: Vec::new(), bytes: 0, limit: 0 });
            open.len() - 1
        });
        let bucket = &mut open[at];
        bucket.members.push(index);
        bucket.bytes += bytes;
        if limits.get(bucket.limit).is_some_and(|limit| bucket.bytes >= *limit) {
            full.push(std::mem::take(&mut bucket.members));
            bucket.bytes = 0;
            bucket.limit = (bucket.limit + 1).min(limits.len() - 1);
        }
    }
    full.extend(open.into_iter().map(|bucket| bucket.members).filter(|members| !members.is_empty()));
    full
}

#[cfg(test)]
mod tests {
    use super::*;

    fn item(elements: usize, kind: Kind) -> Item {
        Item { bytes: elements * kind.elt_size_in_bytes(), kind, device: Device::Cpu }
    }

    fn forward(items: &[Item], limits: &[usize]) -> Vec<Vec<usize>> {
        assign(items, &(0..items.len()).collect::<Vec<_>>(), limits)
    }

    // The four results that PyTorch's own tests expect of the same sizes and limits.
    #[test]
    fn plans_equal_pytorch_s() {
        let (float, double) = (Kind::Float, Kind::Double);
        let one = [100, 200, 100, 50].map(|n| item(n, float));
        assert_eq!(forward(&one, &[400]), [vec![0], vec![1], vec![2], vec![3]]);
        let mixed = [(50, float), (25, double), (50, float), (25, double), (50, float), (25, double)];
        let mixed = mixed.map(|(n, kind)| item(n, kind));
        assert_eq!(forward(&mixed, &[400]), [vec![0, 2], vec![1, 3], vec![4], vec![5]]);
        let small = [10, 10, 10, 10].map(|n| item(n, float));
        assert_eq!(forward(&small, &[40, 80]), [vec![0], vec![1, 2], vec![3]]);
        assert_eq!(forward(&mixed, &[200, 400]), [vec![0], vec![1], vec![2, 4], vec![3, 5]]);
    }

    #[test]
    fn the_mlp_in_reverse_order_makes_a_small_first_bucket() {
        // 784-2048-2048-10, weights and biases in creation order, MiB limits 1 and 25.
        let sizes = [784 * 2048, 2048, 2048 * 2048, 2048, 2048 * 10, 10];
        let items = sizes.map(|n| item(n, Kind::Float));
        let order: Vec<usize> = (0..6).rev().collect();
        // 40 + 81,920 + 8,192 + 16,777,216 bytes reach 1 MiB; the rest stays under 25 MiB.
        assert_eq!(assign(&items, &order, &[1 << 20, 25 << 20]), [vec![5, 4, 3, 2], vec![1, 0]]);
    }

    #[test]
    fn every_tensor_is_in_one_bucket_and_types_never_mix() {
        let kinds = [Kind::Float, Kind::Half, Kind::Double];
        let items: Vec<Item> = (0..50).map(|i| item(i * 37 % 101, kinds[i % 3])).collect();
        let plan = forward(&items, &[64, 300]);
        let mut seen: Vec<usize> = plan.concat();
        seen.sort_unstable();
        assert_eq!(seen, (0..50).collect::<Vec<_>>());
        assert!(plan.iter().all(|bucket| bucket.iter().all(|&i| items[i].kind == items[bucket[0]].kind)));
    }

    #[test]
    fn nothing_to_plan_and_no_limit_are_fine() {
        assert_eq!(forward(&[], &[1]), Vec::<Vec<usize>>::new());
        assert_eq!(forward(&[item(9, Kind::Float), item(9, Kind::Float)], &[]), [vec![0, 1]]);
    }
}
