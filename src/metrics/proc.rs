//! /proc.
