// SPDX-License-Identifier: MIT OR GPL-2.0
/* A module that takes its time to come (init_ms) and to go (exit_ms). */
#include <linux/delay.h>
#include <linux/module.h>

static int init_ms;
module_param(init_ms, int, 0444);
static int exit_ms;
module_param(exit_ms, int, 0444);

static int __init slow_init(void)
{
	msleep(init_ms);
	return 0;
}

static void __exit slow_exit(void)
{
	msleep(exit_ms);
}

module_init(slow_init);
module_exit(slow_exit);
MODULE_LICENSE("Dual MIT/GPL");
