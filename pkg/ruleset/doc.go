// Package ruleset reads rules of nf_tables from their bytes alone: it makes no request to the
// kernel and executes no program.
//
// [Words] returns a rule as iptables-nft-save prints it, or false for a rule that it does not
// know completely. [Label] returns a text for people for any rule. Neither fails, and any
// goroutine may call them.
package ruleset
