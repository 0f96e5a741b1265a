//! Who a worker is that somebody else started: torchrun, a scheduler, or a person with two terminals.
//!
//! Pure: variables in, identity or error out.

use super::protocol::StoreAddress;
use crate::error::{Error, Result};
use std::path::PathBuf;

/// One rank, as its environment describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankEnv {
    /// Which of all processes.
    pub rank: usize,
    /// How many processes.
    pub world_size: usize,
    /// Which process of this host.
    pub local_rank: usize,
    /// Where they meet.
    pub store: StoreAddress,
}

impl RankEnv {
    /// Reads torchrun's variables: `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR`, `MASTER_PORT`,
    /// `TORCHELASTIC_USE_AGENT_STORE`. `DPVSDDP_STORE=file:PATH` takes the place of the address on one
    /// host. `local_rank` is what some launchers pass as an option; the variable wins.
    pub fn read(variable: impl Fn(&str) -> Option<String>, local_rank: Option<usize>) -> Result<Self> {
        let variable = |name: &str| variable(name).filter(|value| !value.trim().is_empty());
        let required = |name: &str| {
            variable(name).ok_or_else(|| {
                Error::usage(format!("`{name}` is not set, so this worker does not know its place")).hint(
                    "start workers with `compare`, `train` or torchrun, or set RANK, WORLD_SIZE and DPVSDDP_STORE=file:PATH",
                )
            })
        };
        let rank: usize = number("RANK", &required("RANK")?)?;
        let world_size: usize = number("WORLD_SIZE", &required("WORLD_SIZE")?)?;
        if rank >= world_size {
            return Err(Error::usage(format!("RANK={rank} is not below WORLD_SIZE={world_size}"))
                .hint("ranks count from 0 to WORLD_SIZE - 1"));
        }
        let file = variable("DPVSDDP_STORE");
        let local_rank = match (variable("LOCAL_RANK"), local_rank, &file) {
            (Some(text), _, _) => number("LOCAL_RANK", &text)?,
            (None, Some(local_rank), _) => local_rank,
            // One host: both numberings are the same.
            (None, None, Some(_)) => rank,
            (None, None, None) => number("LOCAL_RANK", &required("LOCAL_RANK")?)?,
        };
        if local_rank > rank {
            return Err(Error::usage(format!("LOCAL_RANK={local_rank} is above RANK={rank}"))
                .hint("a process's number on its host cannot be above its number among all"));
        }
        let store = match file {
            Some(address) => file_store(&address)?,
            None => {
                let agent = variable("TORCHELASTIC_USE_AGENT_STORE");
                let port: u16 = number("MASTER_PORT", &required("MASTER_PORT")?)?;
                if port == 0 {
                    return Err(Error::usage("MASTER_PORT=0 would let every rank choose its own port")
                        .hint("give all ranks the same port, from 1 to 65535"));
                }
                StoreAddress::Tcp {
                    host: required("MASTER_ADDR")?,
                    port,
                    serve: rank == 0 && !agent.is_some_and(|value| value.eq_ignore_ascii_case("true")),
                }
            }
        };
        Ok(Self { rank, world_size, local_rank, store })
    }
}

fn number<T: std::str::FromStr>(name: &str, text: &str) -> Result<T> {
    text.trim().parse().map_err(|_| {
        Error::usage(format!("{name}={text} is not a number that fits"))
            .hint(format!("set {name} to a whole number"))
    })
}

fn file_store(address: &str) -> Result<StoreAddress> {
    match address.strip_prefix("file:") {
        Some(path) if !path.is_empty() => Ok(StoreAddress::File(PathBuf::from(path))),
        _ => Err(Error::usage(format!("DPVSDDP_STORE={address} is not an address of a store"))
            .hint("write it as DPVSDDP_STORE=file:/path/all/ranks/can/open")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &[(&str, &str)]) -> Result<RankEnv> {
        let get = |name: &str| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        };
        RankEnv::read(get, None)
    }

    const TORCHRUN: [(&str, &str); 5] = [
        ("RANK", "0"),
        ("WORLD_SIZE", "4"),
        ("LOCAL_RANK", "0"),
        ("MASTER_ADDR", "node7"),
        ("MASTER_PORT", "29500"),
    ];

    #[test]
    fn torchrun_agent_serves_the_store() {
        let mut variables = TORCHRUN.to_vec();
        let serving = |variables: &[_]| match read(variables).unwrap().store {
            StoreAddress::Tcp { host, port, serve } => {
                assert_eq!((host.as_str(), port), ("node7", 29500));
                serve
            }
            StoreAddress::File(path) => panic!("not a file: {path:?}"),
        };
        assert!(serving(&variables), "rank 0 serves where no agent does");
        variables.push(("TORCHELASTIC_USE_AGENT_STORE", "True"));
        assert!(!serving(&variables));
    }

    #[test]
    fn a_file_store_needs_no_local_rank() {
        let env = read(&[("RANK", "1"), ("WORLD_SIZE", "2"), ("DPVSDDP_STORE", "file:/tmp/s")]).unwrap();
        let store = StoreAddress::File("/tmp/s".into());
        assert_eq!(env, RankEnv { rank: 1, world_size: 2, local_rank: 1, store });
    }

    #[test]
    fn what_is_wrong_is_named() {
        let message = |variables: &[_]| read(variables).unwrap_err().to_string();
        assert!(message(&[]).starts_with("`RANK` is not set"));
        assert!(message(&[("RANK", "0")]).starts_with("`WORLD_SIZE` is not set"));
        assert_eq!(message(&[("RANK", "2"), ("WORLD_SIZE", "2")]), "RANK=2 is not below WORLD_SIZE=2");
        assert_eq!(message(&[("RANK", "-1"), ("WORLD_SIZE", "2")]), "RANK=-1 is not a number that fits");
        let with = |name, value| {
            let mut variables = TORCHRUN.to_vec();
            variables.retain(|(known, _)| *known != name);
            variables.push((name, value));
            message(&variables)
        };
        assert!(with("LOCAL_RANK", "").starts_with("`LOCAL_RANK` is not set"));
        assert_eq!(with("LOCAL_RANK", "3"), "LOCAL_RANK=3 is above RANK=0");
        assert_eq!(with("MASTER_PORT", "65536"), "MASTER_PORT=65536 is not a number that fits");
        assert!(with("MASTER_PORT", "0").contains("choose its own port"));
        assert!(with("MASTER_ADDR", " ").starts_with("`MASTER_ADDR` is not set"));
        assert!(with("DPVSDDP_STORE", "tcp://x").starts_with("DPVSDDP_STORE=tcp://x is not an address"));
    }

    #[test]
    fn an_option_stands_in_for_the_variable() {
        let get = |name: &str| {
            [("RANK", "3"), ("WORLD_SIZE", "4"), ("MASTER_ADDR", "h"), ("MASTER_PORT", "1")]
                .iter()
                .find(|(known, _)| *known == name)
                .map(|(_, value)| (*value).to_owned())
        };
        assert_eq!(RankEnv::read(get, Some(1)).unwrap().local_rank, 1);
    }
}
