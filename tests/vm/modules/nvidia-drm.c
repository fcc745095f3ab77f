// SPDX-License-Identifier: MIT OR GPL-2.0
/* Stand-in for nvidia-drm: depends on nvidia-modeset. */
#include <linux/module.h>

extern int nvidia_modeset_get_kms_ops(void);

static int __init stand_in_init(void)
{
	return nvidia_modeset_get_kms_ops();
}

static void __exit stand_in_exit(void)
{
}

module_init(stand_in_init);
module_exit(stand_in_exit);
MODULE_LICENSE("Dual MIT/GPL");
