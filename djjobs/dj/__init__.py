"""All that touches DataJoint's inside: what differs between its versions, and what is changed in it."""
