// Package protect says what canaryd guards: which tables, which chains and which rules of
// built-in chains, by owner. A preset names the rules of one owner, such as kube-proxy or CNI
// plugins, and a word rule: names single rules; a [Selector] is the value of --protect. The package
// does no I/O. Its values do not change after they were made, so that many goroutines may use them
// at a time.
package protect

import "github.com/canaryd/canaryd/pkg/rules"

// Tables returns the tables that canaryd guards, in the order in which a replay writes them.
func Tables() []rules.TableName { return []rules.TableName{rules.Mangle, rules.Nat, rules.Filter} }

// Unguarded returns iptables' tables that canaryd does not guard: it plants no marks there and puts
// nothing back.
func Unguarded() []rules.TableName { return []rules.TableName{rules.Raw, rules.Security} }
