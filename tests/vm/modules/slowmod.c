// SPDX-License-Identifier: MIT OR GPL-2.0
/* A module that takes its time to come: at most init_ms, and 0 written to it meanwhile ends that. */
#include <linux/delay.h>
#include <linux/module.h>

static int init_ms;
module_param(init_ms, int, 0644);

static int __init slow_init(void)
{
	int waited;

	for (waited = 0; waited < init_ms; waited += 10)
		msleep(10);
	return 0;
}

static void __exit slow_exit(void)
{
}

module_init(slow_init);
module_exit(slow_exit);
MODULE_LICENSE("Dual MIT/GPL");
