package main

import "github.com/spf13/cobra"

func (a *app) demo() *cobra.Command { return &cobra.Command{Use: "demo"} }
func (a *app) dump() *cobra.Command { return &cobra.Command{Use: "dump"} }
