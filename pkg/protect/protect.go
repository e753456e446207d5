// Package protect decides which tables, chains and rules of built-in chains canaryd guards, by
// owner.
//
// [Split] and [NewSelector] parse the value of --protect. A preset names the rules of one owner,
// such as kube-proxy or CNI plugins, and a word rule: names single rules. [Selector.Protection]
// extracts the protected part of iptables' tables; [Selector.ProtectsTable] reports whether a
// native table is protected. [UnguardedIn] lists rules that nothing guards, and [Propose] the words
// that would guard them. [Attachments] and [Lacking] find the rules of single containers.
//
// NewSelector returns an error for a word that it does not know. The package does no I/O. Its
// values do not change after they were made, so that many goroutines may use them at a time.
package protect

import "github.com/canaryd/canaryd/pkg/rules"

// Tables returns the tables that canaryd guards, in the order in which a replay writes them.
func Tables() []rules.TableName {
	return []rules.TableName{rules.Raw, rules.Mangle, rules.Nat, rules.Filter, rules.Security}
}

// TableCount is how many tables there are.
const TableCount = 5

// Always returns those tables of [Tables] that canaryd guards on each node: where one of them
// exists it has marks, whether or not something is protected in it. Most flushes take one of
// these, and a mark there is how canaryd notices the next one.
func Always() []rules.TableName {
	return []rules.TableName{rules.Mangle, rules.Nat, rules.Filter}
}

// OnDemand reports whether a table is guarded only while something is protected in it. Until then
// it has no marks, and canaryd does not make it: few nodes have rules in raw or security, and from
// the moment that a legacy table exists the kernel takes each packet through it.
func OnDemand(t rules.TableName) bool { return t == rules.Raw || t == rules.Security }
