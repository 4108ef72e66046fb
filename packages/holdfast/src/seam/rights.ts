/** The rights to Holdfast's own tables and routines that a role needs to use them. */

/** Some privileges on some things of ours, by their plain names. */
export interface Right {
  readonly kind: "schema" | "table" | "sequence" | "routine";
  readonly privileges: readonly string[];
  readonly names: readonly string[];
}

/** `privileges`: with commas between them. `names`: with blanks. */
export const onTables = (privileges: string, ...names: readonly string[]): Right => ({
  kind: "table",
  privileges: privileges.split(", "),
  names: names.flatMap((some) => some.split(" ")),
});

/** One of them. `name`: as it is written in SQL. */
export interface LackingRight {
  readonly privilege: string;
  readonly name: string;
}

/** For people: "SELECT, INSERT on holdfast.lease, holdfast.resource", one line for each set of privileges. */
export function listed(lacking: readonly LackingRight[]): readonly string[] {
  const privileges = Map.groupBy(lacking, ({ name }) => name);
  const names = Map.groupBy(privileges.keys(), (name) =>
    (privileges.get(name) ?? []).map(({ privilege }) => privilege).join(", "),
  );
  return [...names].map(([set, all]) => `${set} on ${all.join(", ")}`);
}

/** Each privilege of each thing, to be asked about. */
export function each(rights: readonly Right[], kind: Right["kind"]): readonly LackingRight[] {
  return rights
    .filter((right) => right.kind === kind)
    .flatMap(({ privileges, names }) =>
      names.flatMap((name) => privileges.map((privilege) => ({ privilege, name }))),
    );
}
