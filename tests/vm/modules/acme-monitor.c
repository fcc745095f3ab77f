// SPDX-License-Identifier: MIT OR GPL-2.0
/* A module of somebody else that depends on the driver, as some monitoring and storage products have. */
#include <linux/module.h>

extern int nvidia_get_rm_ops(void);

static int __init stand_in_init(void)
{
	return nvidia_get_rm_ops();
}

static void __exit stand_in_exit(void)
{
}

module_init(stand_in_init);
module_exit(stand_in_exit);
MODULE_LICENSE("Dual MIT/GPL");
