# two_nodes.sh COMMAND0 COMMAND1: each command in a network namespace of its own, a pair of virtual interfaces between
# them: 10.77.0.1 and 10.77.0.2. Run it under `unshare -Urnpf --kill-child --mount-proc`: the namespaces and all
# processes go when it ends.
set -e
unshare -n sleep 1000 & first=$!
unshare -n sleep 1000 & second=$!
here=$(readlink /proc/self/ns/net)
for one in $first $second; do
  while [ "$(readlink /proc/$one/ns/net)" = "$here" ]; do sleep 0.05; done
done
ip link add node0 type veth peer name node1
ip link set node0 netns "$first" name eth0
ip link set node1 netns "$second" name eth0
inside() { one=$1; shift; nsenter -t "$one" -n "$@"; }
number=1
for one in $first $second; do
  inside "$one" ip addr add 10.77.0.$number/24 dev eth0
  inside "$one" ip link set eth0 up
  inside "$one" ip link set lo up
  number=$((number + 1))
done
inside "$first" sh -c "$1" & node0=$!
inside "$second" sh -c "$2" & node1=$!
status=0
wait $node0 || status=$?
wait $node1 || status=$?
exit $status
