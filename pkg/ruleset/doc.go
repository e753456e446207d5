// Package ruleset reads rules of nf_tables from their bytes alone: it asks no kernel and executes
// nothing. Words says a rule in the words of iptables.
package ruleset
