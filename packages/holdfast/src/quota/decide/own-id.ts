/** Ids that Holdfast makes itself: each follows from the entry that it is about, so that the same step is found again. */
const kinds = ["settle", "release", "refund", "revoke", "rollup", "expire", "lapse"] as const;

export function ownId(kind: (typeof kinds)[number], ...about: readonly (string | number)[]): string {
  return [kind, ...about].join(":");
}

/** No id of a caller may begin like this, or it could take the place of one of ours. */
export const ownPrefixes: readonly string[] = kinds.map((kind) => `${kind}:`);
