"""Commands that measure: evaluations, comparisons, suites, exports, audits."""
