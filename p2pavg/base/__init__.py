"""The ground on which every other room stands: errors, results, encodings, threads, limits."""
