"""Which page goes when a pool is full and tenants share it.

A tenant that fills more than its share loses its own pages first, and never takes from what others have within
theirs. A tenant within its share takes from those above theirs, then from anyone. So a tenant that is alone may fill
everything, and a share of 1 leaves all to the eviction policy.
"""

from collections import Counter
from collections.abc import Callable, Collection

from prfaas.core.pool.eviction import EvictionPolicy


class TenantEviction:
    """An eviction policy over all pages, one over each tenant's, and what each tenant fills.

    Args:
        capacity_bytes: Of all pages together.
        make_policy: An empty policy.
        tenant_share: Part of the capacity that a tenant keeps against others' new pages, in (0, 1].
    """

    def __init__(
        self,
        capacity_bytes: int,
        make_policy: Callable[[], EvictionPolicy[bytes]],
        tenant_share: float = 1.0,
    ) -> None:
        if not 0 < tenant_share <= 1:
            raise ValueError(f"a tenant's share of a pool is above 0 and at most 1, not {tenant_share}")
        self._share_bytes = capacity_bytes * tenant_share
        self._has_shares = tenant_share < 1
        self._make_policy = make_policy
        self._all = make_policy()
        self._of_tenant: dict[bytes, EvictionPolicy[bytes]] = {}
        # Page → its tenant and size.
        self._pages: dict[bytes, tuple[bytes, int]] = {}

    @property
    def used_bytes(self) -> int:
        """Bytes of all pages."""
        return self._all.used_bytes

    def tenant_bytes(self, tenant: bytes) -> int:
        """Bytes of a tenant's pages, where tenants have shares."""
        policy = self._of_tenant.get(tenant)
        return 0 if policy is None else policy.used_bytes

    def added(self, page: bytes, size_bytes: int, group: int, parent: bytes | None, tenant: bytes) -> None:
        """A page is here now. One that is here already stays its first tenant's and is only touched.

        Args:
            page: Its id.
            size_bytes: The room that it takes.
            group: The number of its KV group.
            parent: The page without which it is of no use; None: not known, or none.
            tenant: Whose it is.
        """
        if page in self._pages:
            self.touched(page)
            return
        self._pages[page] = (tenant, size_bytes)
        self._all.added(page, size_bytes, group, parent)
        if self._has_shares:
            own = self._of_tenant.get(tenant)
            if own is None:
                own = self._of_tenant[tenant] = self._make_policy()
            own.added(page, size_bytes, group, parent)

    def touched(self, page: bytes) -> None:
        """A page was used again. One that is not here is passed over."""
        if (entry := self._pages.get(page)) is None:
            return
        self._all.touched(page)
        if self._has_shares:
            self._of_tenant[entry[0]].touched(page)

    def removed(self, page: bytes) -> None:
        """A page is no longer here. One that is not here is passed over."""
        entry = self._pages.pop(page, None)
        if entry is None:
            return
        self._all.removed(page)
        if self._has_shares:
            own = self._of_tenant[entry[0]]
            own.removed(page)
            if not own.used_bytes:
                del self._of_tenant[entry[0]]

    def victim(self, tenant: bytes, size_bytes: int, may_go: Callable[[bytes], bool]) -> bytes | None:
        """The next page to go for a new one; it stays known until it is `removed`.

        Args:
            tenant: Whose the new page is.
            size_bytes: Of the new page.
            may_go: False of pages in use.

        Returns:
            None if there is no room to be made for this tenant.
        """
        if not self._has_shares:
            return self._all.victim(may_go)
        if self.tenant_bytes(tenant) + size_bytes > self._share_bytes:
            own = self._of_tenant.get(tenant)
            found = None if own is None else own.victim(may_go)
            return found if found is not None else self._victim_above_share(tenant, may_go)
        found = self._victim_above_share(tenant, may_go)
        return found if found is not None else self._all.victim(may_go)

    def may_lose(self, tenant: bytes, size_bytes: int, pages: Collection[bytes]) -> bool:
        """True if all these pages may go for one new page of a tenant, so that nobody is pushed below its share."""
        if not self._has_shares or self.tenant_bytes(tenant) + size_bytes <= self._share_bytes:
            return True
        lost: Counter[bytes] = Counter()
        for page in pages:
            owner, size = self._pages[page]
            lost[owner] += size
        return all(
            owner == tenant or self.tenant_bytes(owner) - size >= self._share_bytes
            for owner, size in lost.items()
        )

    def _victim_above_share(self, tenant: bytes, may_go: Callable[[bytes], bool]) -> bytes | None:
        """A page of the tenant most above its share that isn't pushed below it by the loss."""
        above = [
            policy
            for owner, policy in self._of_tenant.items()
            if owner != tenant and policy.used_bytes > self._share_bytes
        ]
        for policy in sorted(above, key=lambda policy: -policy.used_bytes):
            spare_bytes = policy.used_bytes - self._share_bytes
            found = policy.victim(may_go)
            if found is not None and self._pages[found][1] <= spare_bytes:
                return found
        return None
