/** One client for each file, as an application has one for its database. */
export function opened<T>(open: (file: string) => T): (file: string) => T {
  const clients = new Map<string, T>();
  return (file) => {
    let client = clients.get(file);
    if (client === undefined) clients.set(file, (client = open(file)));
    return client;
  };
}
